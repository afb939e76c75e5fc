"""Who may do what, and how much of it: tokens, what each method asks for, limits."""
