"""What a search of layouts says: tables, wishes, sizes, a curve of memory, how sure it is."""
