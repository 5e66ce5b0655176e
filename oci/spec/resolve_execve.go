package spec

import (
	"os"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Limits of execve(2) (fs/exec.c of the kernel).
const (
	// MaxExec is the maximum for all arguments and variables of a program, in
	// bytes as ExecSize counts them.
	MaxExec     = 6 << 20
	minExec     = 128 << 10 // regardless of the stack limit
	stringPages = 32
	// defaultStack is the kernel's default soft limit.
	defaultStack = 8 << 20
)

// MaxExecString returns the maximum length, in bytes, of one argument or of one
// variable with its name.
func MaxExecString() int { return stringPages*os.Getpagesize() - 1 } // and a NUL

// ExecSize returns how much of execve(2)'s space count strings with that many
// bytes take: a NUL and a pointer each.
func ExecSize(count, bytes int) int { return bytes + count*(1+strconv.IntSize/8) }

// CheckExec refuses arguments and variables with which no program can be
// started. stack is the soft stack limit that applies if the process sets none.
// A started program may get a higher limit by default, so a value below the
// kernel's default counts as that default.
func CheckExec(p *specs.Process, stack uint64) error {
	size := 0
	for i, arg := range p.Args {
		if problem := execProblem(arg); problem != "" {
			return invalid("argument %d of the command %s", i, problem)
		}
		size += ExecSize(1, len(arg))
	}
	for _, entry := range p.Env {
		name, _, _ := strings.Cut(entry, "=")
		if name == "" {
			return invalid("environment has a variable without a name")
		}
		if problem := execProblem(entry); problem != "" {
			return invalid("environment variable %.80q %s", name, problem)
		}
		size += ExecSize(1, len(entry))
	}
	if most := execSpace(stackLimit(p, stack)); size > most {
		return invalid("arguments and environment variables take %d bytes in total, but the kernel passes at most %d to a program: put large values into files", size, most)
	}
	return nil
}

func execProblem(text string) string {
	switch {
	case len(text) > MaxExecString():
		return "has " + strconv.Itoa(len(text)) + " bytes, but the kernel passes at most " + strconv.Itoa(MaxExecString()) + " to a program: put it into a file"
	case strings.ContainsRune(text, 0):
		return "contains a NUL byte"
	}
	return ""
}

// stackLimit returns the soft stack limit with which the process begins.
func stackLimit(p *specs.Process, otherwise uint64) uint64 {
	for _, limit := range p.Rlimits {
		if limit.Type == "RLIMIT_STACK" {
			return limit.Soft
		}
	}
	return max(otherwise, defaultStack)
}

// execSpace returns a quarter of the stack, within bounds.
func execSpace(stack uint64) int { return int(max(min(stack/4, MaxExec), minExec)) }
