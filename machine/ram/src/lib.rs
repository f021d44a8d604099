//! Guest RAM: one memory object, its GPA layout, and the code-page bitmap.
