from clearhead.course.sources import document, documents


list(documents())  # → ['ceng403-exam', 'ceng403-answered', 'csci2572-homework', 'transformer-exercises', 'deep-learning-final']

first = document("ceng403-exam").questions[0]  # a CourseDocument of DocumentQuestion, each with DocumentAnswer
first.answers[0].command
