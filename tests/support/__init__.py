"""Shared by tests: file writers that can lie, scripted models, local servers."""
