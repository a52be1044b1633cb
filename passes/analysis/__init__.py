"""What is known of every value of a graph; nothing here changes one."""
