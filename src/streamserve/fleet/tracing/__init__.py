"""What happened to each request and when: recorded, exported, written as a timeline."""
