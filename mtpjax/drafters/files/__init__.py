"""Reads and writes published drafters: EAGLE-3 of SpecForge and speculators, Medusa of its authors and of vLLM."""
