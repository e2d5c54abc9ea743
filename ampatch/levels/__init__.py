"""What an opt level is (policy, loss scale options, dtypes), and what every room stands on.

Imports `errors` alone. Private names of torch, the `Patcher`, weak undo and the stack of calls are here, too.
"""
