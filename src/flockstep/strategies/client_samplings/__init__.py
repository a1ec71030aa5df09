"""Rules by which a server chooses the clients of a round."""
