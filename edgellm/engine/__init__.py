"""Requests, blocks, scheduler, sampling and the engine step."""
