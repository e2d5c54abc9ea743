"""What is made of the runs, by pure functions: a row for each level, its verdict, and what is advised."""
