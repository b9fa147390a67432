"""Names, store, pull and plan."""
