"""What watches training and changes none of it: alarms, misuse, observers, the doctor.

Each is a listener of the events in `steps/events`; the engine knows none of them. Imports the engine.
"""
