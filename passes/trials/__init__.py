"""Ops run by themselves, whole and in parts, to learn what they do."""
