"""Ops -> plan: record what a strategy issues, check it, show it, agree on it over ranks."""
