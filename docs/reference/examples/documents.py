from clearhead.course.sources import document, documents

list(documents())  # → ['000', '001', '002', '003', '004']

first = document("000").questions[0]  # a CourseDocument of DocumentQuestion, each with DocumentAnswer
first.answers[0].command
