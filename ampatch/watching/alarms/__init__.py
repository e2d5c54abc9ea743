"""What each loss scale went through: a short history, alarms where it goes wrong, and the last batch at hand.

Judges what the scaler knows anyway; nothing here waits for the device, until an alarm asks for a closer look.
"""
