"""Has a script of earlier years run as it is: what `ampatch run --legacy` puts back while it runs."""
