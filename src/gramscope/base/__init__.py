"""The ground floor: axes, errors, checks and random streams. Imports torch and nothing of ours."""
