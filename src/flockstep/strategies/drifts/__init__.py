"""Corrections of the clients' local steps where their data differ."""
