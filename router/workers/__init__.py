"""TODO workers"""
