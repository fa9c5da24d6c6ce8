"""What a person sees: the verbs, their flags, tables and bars, begin and end of a process."""
