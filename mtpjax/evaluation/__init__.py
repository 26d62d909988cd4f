"""Measures acceptance and round costs, and checks that loaded models draft as they did in training."""
