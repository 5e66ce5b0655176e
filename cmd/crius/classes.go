package main

import (
	"context"

	"github.com/crius-run/crius/oci/classes"
)

// checkClasses checks the classes of block I/O and RDT that containers may name.
func (n *node) checkClasses(context.Context) []finding {
	config := podOptions(n.config.Config, "").Classes
	if config == (classes.Config{}) {
		return []finding{ok("none configured")}
	}
	c, err := classes.New(config)
	if err != nil {
		return []finding{fail("correct the file: crius does not start with it", "%v", err)}
	}
	if err := c.FindRDT(); err != nil {
		return []finding{warn("remove runtime.rdt_config_file, or mount resctrl on a node that has RDT: containers in RDT classes are refused", "%v", err)}
	}
	return []finding{ok("can be used")}
}
