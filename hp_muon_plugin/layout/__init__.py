"""Layouts: what each parameter is, how it reads as matrices, and which rank holds which part."""
