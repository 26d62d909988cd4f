"""The code that all methods share for reading and writing the files of published drafters."""
