//! Files that say which faults a machine is to have.

use faults::Scenario;

use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "scenario", seeds, run };

fn seeds() -> Vec<Vec<u8>> {
    [
        "seed = 7\n[[fault]]\non = 'disk0'\ndo = 'lost'\nop = 'write'\nsectors = [8, 64]\nprobability = 0.5\n",
        "[[fault]]\nname = 'a'\non = 'net0'\ndo = { latency = '20ms' }\n[[fault]]\non = 'machine'\ndo = 'stuck'\n",
        "[[fault]]\non = 'ram'\ndo = { flip = { address = 4096, bit = 3 } }\nafter = '1s'\n",
        "[[fault]]\non = 'clock'\ndo = { drift = 100 }\nconsole = 'login:'\n",
        "[[fault]]\non = 'interrupts'\ndo = 'lost'\nevery = '3'\ntimes = 4\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Scenario::parse(text) {
        // Whoever wrote it is told what is wrong.
        Err(problem) => assert!(!problem.to_string().trim().is_empty()),
        Ok(scenario) => {
            let faults = (0..4).map(|n| scenario.of_disk(n).len() + scenario.of_net(n).len());
            let faults =
                faults.sum::<usize>() + scenario.timed().len() + scenario.of_interrupts().len();
            assert!(faults == 0 || !scenario.targets().is_empty(), "faults of nothing");
        }
    }
}
