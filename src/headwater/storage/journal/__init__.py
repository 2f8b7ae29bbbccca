"""The write-ahead journal of all persistent modes. See `segments` for writing, `replay` for reading."""
