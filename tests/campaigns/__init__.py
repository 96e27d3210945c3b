"""Fuzz campaigns: families of numbered random trials whose results accumulate in tests/results/campaigns.

python -m tests.campaigns                          list the families
python -m tests.campaigns settings --minutes 10    run trials for 10 minutes, from the first seed not done
python -m tests.campaigns settings --only-seed 71  replay one trial
"""
