"""Attemper inside of other people's attention."""
