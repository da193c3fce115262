"""Muon over matrices that several ranks share: planned from layouts, chosen by cost, exchanged in batches."""
