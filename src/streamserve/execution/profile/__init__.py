"""Profiles, the measured costs of steps on this machine: measure, store and correct them.

    measure.py     load_or_measure_profile: rounds of memory bandwidth, matrix rate and steps
      steps.py       the points that are measured, and their plans on a separate KV pool
      floor.py       the least time that a step could take, to compare with
      lock.py        one measurement at a time, and the load by other processes
    profile.py     Profile, and the user's folder of profiles
    remeasure.py   measures a profile again, in short pieces
    draft.py       the first estimate of the cost of drafting
    default_swap.py   the host pool's default size, if the cost of copies was measured

workers/ gets a profile when its model is loaded, and measures it again while the worker is idle;
`streamserve profile` measures one with more rounds.
"""
