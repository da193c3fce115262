"""Typed configuration. No module of this package imports torch."""
