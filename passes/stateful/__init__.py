"""Functions that expose their state: how they are told, proved and kept in one piece."""
