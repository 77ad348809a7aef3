"""Images, texts, histograms, figures, sounds and tables that a task logs."""
