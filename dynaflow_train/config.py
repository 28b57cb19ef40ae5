"""Recipes and options; the only reader of the environment."""
