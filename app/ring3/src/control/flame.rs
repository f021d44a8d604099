//! A flame graph as a page of its own: a box for each function, as wide as its share of the samples, above who called it.

use std::collections::BTreeMap;

/// The page; the stacks are put where it says so.
const PAGE: &str = include_str!("flame.html");
const HERE: &str = "/*STACKS*/[]";

/// The page of so many samples of each stack.
pub(super) fn page(stacks: &BTreeMap<Vec<String>, u64>) -> String {
    let stacks: Vec<_> = stacks.iter().collect();
    let json = serde_json::to_string(&stacks).unwrap_or_default();
    // Nothing in a name may end the script.
    PAGE.replace(HERE, &json.replace('<', "\\u003c"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_script() {
        let stack = vec!["sh".to_owned(), "</script><b>".to_owned()];
        let page = page(&BTreeMap::from([(stack, 3)]));
        assert!(page.contains(r#"[["sh","\u003c/script>\u003cb>"],3]"#), "{page}");
        assert!(!page.contains("<b>"));
    }
}
