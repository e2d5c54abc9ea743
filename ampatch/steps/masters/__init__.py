"""Half weights and their masters: one record a weight, the groups that hold masters, their gradients."""
