"""What this router shows of itself, for operators: its status, and what goes on, as it goes on."""
