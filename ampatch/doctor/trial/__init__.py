"""Do what the advice says, run the script again, and see whether it trains."""
