"""What a sweep shows, in the terminal and on its page: functions of its rows."""
