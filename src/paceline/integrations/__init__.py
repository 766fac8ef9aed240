"""Paceline inside other people's programs, and its drafters inside other engines."""
