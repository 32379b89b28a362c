"""What searches where a memory cap leaves no room for schedules made without one."""
