"""Hydra 1.3 looks for plugins here. Nothing but the import in searchpath.py belongs here."""
