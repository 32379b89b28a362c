"""What a search of layouts says: tables, what it costs to insist, a curve of memory, how sure it is."""
