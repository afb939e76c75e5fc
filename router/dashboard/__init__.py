"""TODO dashboard"""
