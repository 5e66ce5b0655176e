// Command idle is the reference for the budgets: a Go program that only sleeps.
package main

import "time"

func main() { time.Sleep(1<<63 - 1) }
