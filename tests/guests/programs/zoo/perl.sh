# program: Perl
# short
# does: sorts, forks, signals, expressions, big hashes
# needs: perl
# version: perl -e 'print $^V'
# seconds: 60
cat > a.pl <<'C'
my ($s, %h) = 0; for my $i (0 .. 500000) { $s = ($s * 31 + $i) % 4294967291; $h{$i % 5000} .= chr(65 + $i % 26) }
print "$s ", join(",", (sort { $h{$a} cmp $h{$b} || $a <=> $b } keys %h)[0 .. 3]), "\n";
my $text = join "", map { $h{$_} } sort { $a <=> $b } keys %h; my $n = () = $text =~ /A.{3}E/g; print "$n\n";
pipe my $r, my $w; my $seen = "no signal\n"; local $SIG{USR1} = sub { $seen = "signal\n" };
if (my $p = fork) { close $w; print <$r>; waitpid $p, 0; print $? >> 8, "\n", $seen } else { kill USR1 => getppid; print $w "child\n"; close $w; exit 9 }
select undef, undef, undef, 0.01; printf "%.10f\n", sin 1e5;
C
perl -e '$| = 1; do "./a.pl"'
