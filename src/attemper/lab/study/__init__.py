"""Studies: recipes × seeds on one task, resumable, by any number of processes, with honest statistics."""
