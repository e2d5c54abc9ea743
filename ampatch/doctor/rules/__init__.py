"""What breaks a training, loudly or silently: one table of rules, with the reason in words and what to do."""
