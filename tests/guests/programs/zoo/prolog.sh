# program: SWI-Prolog
# does: searches, collects garbage, big numbers
# needs: swipl
# version: swipl --version
# seconds: 60
cat > a.pl <<'C'
queens(N, Qs) :- numlist(1, N, Ns), permutation(Ns, Qs), safe(Qs).
safe([]). safe([Q|Qs]) :- no_attack(Q, Qs, 1), safe(Qs).
no_attack(_, [], _). no_attack(Q, [Q1|Qs], D) :- Q =\= Q1 + D, Q =\= Q1 - D, D1 is D + 1, no_attack(Q, Qs, D1).
:- queens(7, Qs), print(Qs), nl, findall(X, between(1, 200000, X), L), sum_list(L, S), X is S ** 5 mod 1000003, print(X), nl, halt.
C
swipl -q a.pl
