"""Workers on other machines: the head's launcher that they join, and the agent that starts them there."""
