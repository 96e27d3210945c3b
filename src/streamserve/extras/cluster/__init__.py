"""Workers on other machines: the head's launcher, and the agents that join it and start workers on their
machines."""
