"""Tests, foldered by the part they test; `support` holds what several of them share."""
